"""What only one rule of an algorithm may do, and why."""

# A variate learns from local steps: it takes the other's correction for a gradient.
VARIATES = "correct local steps by control variates, which would correct the drift twice"
# h_i, a_i, lambda_i: sums over a client's past rounds, which hold the same drift.
DUALS = "pull a client back by what it remembers of its rounds, which would count them twice"
MOMENTUM = "take the server's momentum into local steps, which would count it twice"
