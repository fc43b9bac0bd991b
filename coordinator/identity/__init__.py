"""Who belongs to a federation: its authority, tokens, the ledger of agents, and the enrolment port."""
