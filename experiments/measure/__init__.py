"""What a trained model does and how its heads do it, and the claims held against that."""
