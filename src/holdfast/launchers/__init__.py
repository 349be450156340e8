"""What starts a job on machines that a batch system or a cluster gives: files that people read and change."""
