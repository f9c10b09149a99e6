"""The algebra: tasks, rules, algorithms and the round they make."""
