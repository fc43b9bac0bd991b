"""Who belongs to a federation: its certificate authority, tokens, the ledger of agents, and the enrolment port."""
