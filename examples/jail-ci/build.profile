# What the build may reach: one entry a line.
10.78.1.1:80        # the registry of packages
deny 10.78.1.1:22   # not needed: what no line allows is refused
