from undrift.verify.longhand.control import *  # noqa: F403
