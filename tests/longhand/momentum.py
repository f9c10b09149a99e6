from undrift.verify.longhand.momentum import *  # noqa: F403
