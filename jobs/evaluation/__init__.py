"""What jobs.evaluate is made of: cells that read in lock-step, scores, figures to compare with, the report."""
