"""What a job's file comes to for the planner and for recoveries."""
