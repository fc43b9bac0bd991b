"""The ground floor: what every other room uses, and nothing that knows about learning, bundles or messages.

Read in this order: `errors` (the tree of all errors), `task` (what is learned), `config` (configuration files),
`storage`, `own_folders` and `locks` (files on disk), then the rest by name. Modules here import the standard library,
NumPy and pydantic, and no other room but the tensors of `wire`, which `storage` writes to files.
"""
