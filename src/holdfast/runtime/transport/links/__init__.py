"""Links: one-way connections between workers, made once and kept while generations come and go."""
