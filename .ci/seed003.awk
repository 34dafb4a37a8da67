# Prints the tables of "Heigh performance proxy", Figs. 5 and 6, from the output of the tests `seed003::SUITE::ASSERTION`.
# The document's suites have one test each, so a suite's test passes if all its assertions do.

BEGIN {
    name["sudden_exit"] = "Testing client's sudden exit (before/after sending request, after receiving response)"
    name["multiple_connections"] = "Testing multiple connections: (one by one, concurrent)"
    name["multiple_gets"] = "Testing multiple GET requests: (one by one, concurrent)"
    name["multiple_connects"] = "Testing multiple CONNECT requests: (one by one, concurrent)"
    name["multiple_bad_requests"] = "Testing multiple bad requests: (one by one, concurrent)"
    name["multiple_gets_and_connects"] = "Testing multiple GET and CONNECT requests combinations: (one by one, concurrent)"
    suites = split("sudden_exit multiple_connections multiple_gets multiple_connects multiple_bad_requests " \
        "multiple_gets_and_connects", order, " ")
}

/^test seed003::/ {
    split($2, part, "::")
    suite = part[2]
    if (!(suite in name)) { strange = strange " " suite }
    asserted[suite]++
    asserts++
    if ($NF == "ok") { good[suite]++; goods++ }
    line[suite] = line[suite] sprintf("    %-26s %s\n", part[3], $NF == "ok" ? "Passed" : "Failed")
    next
}

# What the tests themselves print of a failure.
/^---- |panicked at|^error|^warning/ { print }

END {
    for (i = 1; i <= suites; i++) {
        suite = order[i]
        if (asserted[suite] > 0) { ran++ }
        if (asserted[suite] > 0 && good[suite] == asserted[suite]) { succeeded++ }
        printf "Suite: %s\n%s", name[suite], line[suite]
    }
    row = "%-14s %8s %5d %5d %9d %6d\n"
    printf "\n%-14s %8s %5s %5s %9s %6s\n", "", "document", "total", "run", "succeeded", "failed"
    printf row, "Suites", "6", suites, ran, succeeded, ran - succeeded
    printf row, "Test cases", "6", suites, ran, succeeded, ran - succeeded
    printf row, "Assertions", "18", asserts, asserts, goods, asserts - goods
    if (strange != "") { print "error: not a suite of the document:" strange > "/dev/stderr" }
    exit !(succeeded == 6 && asserts == 18 && goods == 18 && strange == "")
}
