from undrift.verify.longhand.two_blocks import *  # noqa: F403
