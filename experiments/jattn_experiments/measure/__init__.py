"""What a trained model does, how its heads do it, and the claims about both."""
