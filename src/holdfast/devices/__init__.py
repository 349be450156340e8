"""What workers compute on: the host's processor, or a GPU."""
