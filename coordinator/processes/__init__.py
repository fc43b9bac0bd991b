"""Child processes of the coordinator: started, supervised and spoken to in one way."""
