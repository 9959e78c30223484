"""What the heads of a trained model attend to."""
