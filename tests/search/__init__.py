"""The search: what it finds, what it rules out, and that both are right."""
