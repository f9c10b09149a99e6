"""How a cohort's layers compute inside a program: operations that see all clients at once.

Each is an operation that torch's compiler leaves alone (`torch.library`), with its gradient, and a
function of one client whose vmap rule hands the whole cohort to it.
"""
