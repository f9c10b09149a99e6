"""A trained model in use: predictions, export to one file, a card that describes it."""

from undrift.using.package import Package
from undrift.using.predictions import Predictions
from undrift.using.predictor import Predictor, load_model

__all__ = ["Package", "Predictions", "Predictor", "load_model"]
