from undrift.verify.longhand.fedvra import *  # noqa: F403
