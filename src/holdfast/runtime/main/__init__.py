"""The processes of a job: what runs in each, from its beginning to its end."""
