"""The program in the data center: opens rounds, collects updates, keeps the journal, exports and releases encoders."""
