from undrift.verify.longhand.comfed import *  # noqa: F403
