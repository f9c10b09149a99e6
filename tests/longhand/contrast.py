from undrift.verify.longhand.contrast import *  # noqa: F403
