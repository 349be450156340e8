"""Pipeline templates: which pipelines any number of nodes can form, and how to go from some of them to others."""
