"""What a batch asks the model to predict, and how its answers are scored."""
