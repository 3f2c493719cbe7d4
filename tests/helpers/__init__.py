"""What tests share: models, jobs of worker processes, drawn calls; no tests."""
