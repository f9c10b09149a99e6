from undrift.verify.longhand.local import *  # noqa: F403
