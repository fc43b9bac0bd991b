"""What may leave a device, and what hides or blurs what leaves.

Read in this order: `policy` (what the device's owner allows), `disclosure` (the list of what leaves), `noise` and
`accountant` (differential privacy and what it has cost), `secure_sum` (a sum whose terms nobody sees). Both sides use
this room. It holds no transport and no method.
"""
