"""Logs of what crosses nodes, kept by whoever sent it: records, the chunks they lie in, one who writes, one who reads.

A log belongs to one worker of one job. On that worker's node, and in a store that several nodes reach, it is

    0.1/chunk-00000000-00000000-00000006.log     finished: its number, its first and its last step
    0.1/chunk-00000001-00000006-00000011.log
    0.1/open-00000002.log                        being written, on the node alone
"""
