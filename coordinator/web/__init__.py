"""What browsers and monitoring see of a federation: pages, figures and health, read from its state folder."""
