"""Training runs on disk: checkpoints, run directories, averages."""
