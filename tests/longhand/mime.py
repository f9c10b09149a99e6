from undrift.verify.longhand.mime import *  # noqa: F403
