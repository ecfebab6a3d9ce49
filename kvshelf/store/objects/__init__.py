"""Bytes in object storage. The index of the shelf stays in Redis or in a folder.

    <prefix>/<namespace>/shelf                     proves that the index and this prefix belong together
    <prefix>/<namespace>/<digest>-<random>.kvb     a blob, as a file of a disk home; or another run of bytes

The namespace is derived from the index's key and incarnation. So two shelves that share a prefix do not meet, and an
index that was emptied cannot remove the objects of the one before it: its backup finds them all.
"""
