from undrift.verify.longhand.duals import *  # noqa: F403
