"""What the run report is made of: its facts, its charts, its page."""
