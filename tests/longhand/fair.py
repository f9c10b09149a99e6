from undrift.verify.longhand.fair import *  # noqa: F403
