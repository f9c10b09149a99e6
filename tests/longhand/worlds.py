from undrift.verify.longhand.worlds import *  # noqa: F403
