"""undrift: federated learning that does not drift."""
