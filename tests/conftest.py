"""Without a CUDA device Triton's interpreter stands in; it must be asked for before any import."""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
