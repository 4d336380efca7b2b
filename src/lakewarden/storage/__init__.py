"""Bytes in object stores.

`location` says when two spellings name the same place, `store` what a store must guarantee,
`local` and `cloud` provide stores, `opening` picks one for a location, `contract` checks that a
store keeps its promises (the tests and `lakewarden storage validate` run the same checks).
"""
