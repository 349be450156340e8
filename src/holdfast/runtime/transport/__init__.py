"""What carries tensors and states from worker to worker."""
