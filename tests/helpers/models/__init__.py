"""Small models that several tests use."""
