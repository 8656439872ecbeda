"""Where numbers come from: what is compared, the gate before every time, the limits of the machine, and the report."""
