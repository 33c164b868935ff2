"""How the bundled test model came to be: tokenizer, architecture, training data, the two training stages, evaluation."""
