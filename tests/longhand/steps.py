from undrift.verify.longhand.steps import *  # noqa: F403
