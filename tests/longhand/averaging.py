from undrift.verify.longhand.averaging import *  # noqa: F403
