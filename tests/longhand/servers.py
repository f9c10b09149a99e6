from undrift.verify.longhand.servers import *  # noqa: F403
