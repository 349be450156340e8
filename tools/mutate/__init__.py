"""Mutation testing: what of the code could be wrong without any test being red?"""
