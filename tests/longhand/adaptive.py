from undrift.verify.longhand.adaptive import *  # noqa: F403
