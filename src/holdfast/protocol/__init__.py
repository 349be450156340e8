"""The protocol of one worker, without I/O: what is to be sent, received, computed and reduced, and when."""
