from undrift.verify.longhand.features import *  # noqa: F403
