"""Systems that have no runtime here: what becomes of a job by them, as far as those who made them say what they do."""
