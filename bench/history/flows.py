"""Writes the lines of many flows into files as a history closes them: FOLDER, number of flows, seconds since 1970 of the first one.

The flows have 5,000 hosts (some much more often than others), 24 programs, 500 clients and 30 days. One host in each 20 files is rare.
"""

import random
import sys
import time

LINES = 65536
folder, flows, first = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
chance = random.Random(1)
hosts = [f"host-{number}.example" for number in range(5000)]
weights = [1 / (rank + 1) for rank in range(5000)]
programs = [f"program-{number}" for number in range(24)]
step = 30 * 86400 / flows
line = (
    '{"ts":"%s.%03dZ","flow":%d,"rule":"%s","chain":[],"carrier":"direct","listener":"lan","intercept":"redirect",'
    '"client":"10.1.%d.%d:%d","orig_dst":"198.51.%d.%d:%d","host":"%s","process":"%s","user":"uid:%d","bytes_up":%d,'
    '"bytes_down":%d,"connect_seconds":%.6f,"first_byte_seconds":%.6f,"duration_seconds":%.6f,"shunted":false,"reason":"%s",'
    '"detail":null,"path":null,"agreement":null,"tls_name":null,"states":null,"mptcp":[],"protocol":"tcp","packets_up":null,'
    '"packets_down":null,"held_seconds":null}\n'
)
reasons = ["ok"] * 90 + ["idle"] * 5 + ["refused"] * 3 + ["reset"] * 2
for number in range(0, flows, LINES):
    count = min(LINES, flows - number)
    chosen = chance.choices(hosts, weights, k=count)
    if number // LINES % 20 == 7:
        chosen[count // 2] = "rare.example"
    with open(f"{folder}/{number // LINES + 1:08}.ndjson", "w", buffering=1 << 20) as out:
        second, text = None, ""
        for at in range(count):
            moment = first + (number + at) * step
            if int(moment) != second:
                second = int(moment)
                text = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(second))
            value = chance.getrandbits(64)
            host = chosen[at]
            place = sum(host.encode()) % 250
            out.write(
                line
                % (
                    text,
                    int(moment * 1000) % 1000,
                    number + at + 1,
                    f"rule-{value % 7}",
                    value % 2,
                    value // 2 % 250,
                    1024 + value // 500 % 60000,
                    place,
                    value // 7 % 4,
                    (80, 443, 5432, 22)[value % 4],
                    host,
                    programs[value // 11 % 24],
                    1000 + value % 5,
                    value % 4096,
                    value // 4096 % (1 << (10 + value % 16)),
                    0.0005 + value % 977 / 1e5,
                    0.002 + value % 977 / 1e4,
                    0.01 + value % 99991 / 1e3,
                    reasons[value // 13 % 100],
                )
            )
